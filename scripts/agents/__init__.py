"""Other people's agents, unmodified, against a gateway before the scripted engine: one table."""
