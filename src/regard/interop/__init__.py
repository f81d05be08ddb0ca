"""Import and export of Hugging Face model directories.

A further export format is a module here with a function from a run and a path to what it wrote, registered under its
name: `@EXPORTERS.register("npz")`.
"""

from regard.interop.huggingface import export_run, import_folder
from regard.interop.peft import export_adapter, import_adapter

__all__ = ["export_adapter", "export_run", "import_adapter", "import_folder"]
