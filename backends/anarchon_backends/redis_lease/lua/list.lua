-- In a cluster, takes jobs off the list, or puts them on it again.

for_all(batch.remove, function(...)
  redis.call('ZREM', NS .. ':jobs', ...)
end)
for _, job in ipairs(batch.add) do
  redis.call('ZADD', NS .. ':jobs', 0, job)
end
return reply({})
