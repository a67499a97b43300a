"""The admission webhook: adds the FUSE broker's volume to pods that request FUSE."""
