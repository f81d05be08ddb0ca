"""Import and export of Hugging Face model directories."""

from regard.interop.huggingface import export_run, import_folder

__all__ = ["export_run", "import_folder"]
