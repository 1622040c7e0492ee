"""Pictures in characters, with rich: in a terminal in colour, elsewhere in plain text."""
