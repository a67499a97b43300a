"""The console: pages that show in a browser what is wrong in the fleet, and why.

It reads health's `/state` and the bus; people may act in it only if `writing` is configured. No
other service depends on it. Pages are rendered here and work without JavaScript, except for the
cells of the fleet; JavaScript keeps them current.
"""
