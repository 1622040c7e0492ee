"""Pictures of masks: what is drawn, as arrays, and how it is drawn, in ``figure``, ``terminal`` and ``html``."""
