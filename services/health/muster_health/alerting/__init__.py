"""Decides which alerts to publish for one plugin, and for the whole fleet.

`alert_lifecycle` compares the alerts that should be open with those that were published.
`flap_damping` delays the recovery of plugins and alerts that fail repeatedly. `publication`
decides what to publish about a plugin. `plugin_alert` is the alert about the plugin itself, with
the affected pods; `alert_delay` decides how long it waits. The other alerts are `device_alerts`,
`mount_alerts` (FUSE mounts) and `refused_configuration`. `watched_alerts` has the texts for plugins
that muster does not run, and `evidence` describes observations.
"""
