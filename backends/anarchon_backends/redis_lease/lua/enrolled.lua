-- The last step of a registration (S28): the instance is known, its jobs are listed, and those that
-- it has let go of are its own no more.
--
-- A job is listed after it was registered, and its list is what pruning goes through: see there.

local incarnation = batch.instance.incarnation
for_all(batch.dropped, function(...)
  redis.call('SREM', NS .. ':jobs-of:' .. incarnation, ...)
end)
for _, job in ipairs(batch.jobs) do
  redis.call('ZADD', NS .. ':jobs', 0, job)
end
put_instance(batch.instance, true)
return reply({})
