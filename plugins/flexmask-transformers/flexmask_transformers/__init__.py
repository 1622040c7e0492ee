"""flexmask in Hugging Face Transformers: importing it makes ``attn_implementation="flexmask"`` available for every model."""

try:
    import transformers  # noqa: F401 - only to say what to install
except ImportError as error:
    from flexmask_transformers.versions import requirement

    raise ImportError(f"flexmask_transformers needs Hugging Face Transformers: pip install '{requirement()}'") from error

from flexmask_transformers.check import check_packing
from flexmask_transformers.layers import allow_mixing
from flexmask_transformers.model_mask import to_mask
from flexmask_transformers.recording import masks_of
from flexmask_transformers.registration import register
from flexmask_transformers.user_masks import use_mask

__all__ = ["allow_mixing", "check_packing", "masks_of", "to_mask", "use_mask"]

__version__ = "0.1.0"

register()
