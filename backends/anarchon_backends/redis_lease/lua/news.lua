-- In a cluster, says that a job has news: those who watch look sooner, and nothing depends on it.

news = 1
return reply({})
