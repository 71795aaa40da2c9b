-- The first step of a registration (S28), before its jobs' own: who lives.
--
-- The instance is noted with the jobs that it is about to hold, before it holds the first of them:
-- if it dies in between, whoever prunes finds it here, and its holds by it. It does not count as
-- known before the last step (`enrolled.lua`) of its first registration.

local live = live_instances()
for_all(batch.jobs, function(...)
  redis.call('SADD', NS .. ':jobs-of:' .. batch.instance.incarnation, ...)
end)
put_instance(batch.instance, false)
return reply({ live = live })
