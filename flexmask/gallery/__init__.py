"""The gallery: the masks of a TOML file as pictures, as a README, and as one searchable page."""
