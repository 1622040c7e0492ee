"""The interactive view: one HTML file for a browser or a notebook."""
