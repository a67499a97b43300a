"""Manages all plugins: passes inputs to the right plugin, and finds common causes of failures.

`detector` routes inputs and timers (`timer_queue`) to the plugins of its `registry`; `effects`
decides what follows from what they return, and how much is published. The detector distrusts itself
first, its clock too (`self_check`). `mass_failure` suspends verdicts while many plugins are suspect
at once, `fleet_alerts` are the alerts that concern no single plugin, and `remediation` restarts a
pod, where that is allowed.
"""
