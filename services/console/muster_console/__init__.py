"""The console: pages that show in a browser what is wrong in the fleet, and why.

It reads health's `/state` and the bus; people may act in it only if `writing` is configured. No
other service depends on it. The server renders the pages, so all but the cells of the fleet work
without JavaScript; JavaScript keeps open pages up to date.
"""
