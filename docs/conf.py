"""The build of the documentation: `sphinx-build -W --keep-going docs build/docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # flexmask_docs

import flexmask

project = "flexmask"
author = "The flexmask developers"
copyright = author
release = version = flexmask.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "flexmask_docs",
]
exclude_patterns = ["tutorials"]  # sphinx-gallery writes pages from them

html_theme = "furo"
html_title = "flexmask"
html_static_path = ["static"]
html_css_files = ["flexmask.css"]
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/flexmask/flexmask/",
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "notes_style"), ("Warns", "notes_style")]

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "auto_tutorials",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "flexmask_docs.TutorialOrder",
    "capture_repr": (),
    "image_scrapers": ("matplotlib", "flexmask_docs.last_figure"),
    "notebook_extensions": set(),
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1e9,
}
