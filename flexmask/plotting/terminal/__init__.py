"""Pictures as text, with rich: in color in a terminal, else in ASCII."""
