"""Pictures of masks.

Takes a mask and lengths; gives a raster of categories (what each pixel shows), drawn with matplotlib (``mpl``), as text
(``terminal``) or as an interactive page (``html``).
"""
