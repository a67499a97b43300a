"""Pure: The gate: who brings a token of the cluster may speak on the bus for the node it names."""
