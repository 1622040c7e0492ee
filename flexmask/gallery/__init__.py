"""The gallery: masks of a declarative file as pictures, as a README, and as one page to search in."""
