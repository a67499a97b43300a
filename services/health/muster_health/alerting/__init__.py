"""Decides which alerts to publish for one plugin, and for the whole fleet.

`alert_lifecycle` compares what should be open with what was published, and damps what fails again
and again. `plugin_alerting` publishes a plugin's verdict and its alerts: `plugin_alert` is about
the plugin itself, with the pods that are affected, `device_alerts` are about its devices.
`evidence` puts observations into words.
"""
