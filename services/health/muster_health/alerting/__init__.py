"""From what stands to what is published: the alerts of one plugin, or of the fleet.

`alert_lifecycle` compares what should be open with what was published. `plugin_alerting` publishes
a plugin's verdict and its alerts: `plugin_alert` (with `affected_pods`) is about the plugin itself,
`device_alerts` are about its devices (`device_faults`). `flap_damping` delays what fails again and
again, `evidence` puts observations into words.
"""
