"""The connector's name in vLLM's settings, and the module that has it."""

NAME = "HoldfastConnector"
# By this package's own name, which is another one inside the plugin's distribution.
MODULE = f"{__name__.rpartition('.')[0]}.connector"
