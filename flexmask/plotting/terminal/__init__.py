"""Pictures as text, with rich: in colour in a terminal, else in ASCII."""
