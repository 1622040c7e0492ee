"""Pictures with matplotlib: cells, edges and legend on axes, single or in panels."""
