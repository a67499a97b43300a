"""The admission webhook: gives pods the FUSE broker's volume, not the resource it replaces."""
