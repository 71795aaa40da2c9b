-- The first step of a registration (S28), before its jobs' own: who lives, and which jobs the
-- instance held that it does not hold any more (`dropped`).
--
-- The instance is noted with all jobs that it is about to hold, before it holds the first of them:
-- if it dies in between, whoever prunes finds it here, and its holds by it. It does not count as
-- known before the last step (`enrolled.lua`); until then its heartbeats tell it to register again.

local incarnation = batch.instance.incarnation
local live, dropped, stays = live_instances(), {}, {}
local listed = NS .. ':jobs-of:' .. incarnation
for _, job in ipairs(batch.jobs) do
  stays[job] = true
end
for _, job in ipairs(redis.call('SMEMBERS', listed)) do
  if not stays[job] then
    dropped[#dropped + 1] = job
  end
end
for_all(batch.jobs, function(...)
  redis.call('SADD', listed, ...)
end)
put_instance(batch.instance, false)
return reply({ live = live, dropped = dropped })
