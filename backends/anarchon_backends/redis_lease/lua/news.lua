-- In a cluster, says that a run was freed: those who watch look sooner, and nothing depends on it.

freed_runs = 1
return reply({})
