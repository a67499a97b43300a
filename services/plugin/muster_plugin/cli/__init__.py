"""The command `muster config`: validates, shows and imports configurations (`configure`)."""
