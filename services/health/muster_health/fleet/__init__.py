"""Dispatches inputs to the state machines of all plugins, and finds common causes of failures.

`detector` dispatches inputs and timers (`timer_queue`) to those in its `registry`; `effects` acts
on their results, within rate limits. `self_check` detects faults of health itself: its connection,
its delays and its clock. `mass_failure` recognises that the plugins of many nodes fail at the same
time; `suspension` suspends the verdicts about these plugins, for a limited time. `fleet_alerts` are
the alerts about the whole fleet, and `remediation` restarts a plugin's pod if that is allowed.
"""
