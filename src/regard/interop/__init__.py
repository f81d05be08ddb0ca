"""Other people's checkpoints: Hugging Face directories of GPT-2, BERT and Marian, in and out."""

from regard.interop.huggingface import export_run, import_folder

__all__ = ["export_run", "import_folder"]
