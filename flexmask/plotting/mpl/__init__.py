"""Pictures with matplotlib: cells, edges and legend on axes, single or in panels."""

from flexmask.plotting.mpl.plot import plot_score_panels, plot_scores

__all__ = ["plot_score_panels", "plot_scores"]
