-- The store's time and identity, where nothing else is asked.

return reply({})
