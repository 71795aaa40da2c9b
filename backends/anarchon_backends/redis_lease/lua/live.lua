-- Which instances live: what they hold is in use (S28).

return reply({ live = live_instances() })
