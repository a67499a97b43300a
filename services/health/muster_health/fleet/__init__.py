"""All plugins together: what one input means for which plugin, and what many have in common.

`detector` routes inputs and timers (`timer_queue`) to the plugins of its `registry`, and decides
when and how much is published (`startup_rate_limit`). It distrusts itself first (`self_check`).
`mass_failure` suspends verdicts while many plugins are suspect at once, `clock_skew` decides whose
clock is wrong, `fleet_alerts` are the alerts that concern no single plugin, and `remediation`
restarts a pod, where that is allowed.
"""
