"""From a measured job to a simulated one: its computing, its traffic and its network."""
