"""Pictures of masks: what is drawn, as arrays (``picture``), with matplotlib (``plot``), and in a terminal (``terminal``)."""
