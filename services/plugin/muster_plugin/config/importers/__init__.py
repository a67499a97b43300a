"""Pure: Configurations written for other device plugins, as rules of ours, with the differences."""
