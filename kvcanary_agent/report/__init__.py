"""``kvcanary-agent report``: an incident file for people, in a terminal or as a page of its own."""
