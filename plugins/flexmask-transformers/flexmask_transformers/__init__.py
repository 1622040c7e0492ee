"""flexmask in Hugging Face Transformers: importing it makes ``attn_implementation="flexmask"`` available for every model."""

try:
    import transformers  # noqa: F401 - only to say what to install
except ImportError as error:
    raise ImportError("flexmask_transformers needs Hugging Face Transformers: pip install 'transformers>=5.4,<6'") from error

from flexmask_transformers.registration import register

__all__ = ["register"]

__version__ = "0.1.0"

register()
