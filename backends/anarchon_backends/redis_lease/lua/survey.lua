-- The first step of pruning and of leaving: who lives, a page of the jobs, and the instances that
-- go, each with the jobs that it holds: those long gone, or (`leaving`) that one.

local gone = {}
for incarnation, instance in pairs(instances()) do
  local leaves = batch.leaving == incarnation
  local lost = not batch.leaving and NOW - instance.seen_at > instance.lease_ms + LOST_SHOWN
  if leaves or lost then
    gone[#gone + 1] = {
      incarnation = incarnation, seen_at = instance.seen_at, lease_ms = instance.lease_ms,
      jobs = redis.call('SMEMBERS', NS .. ':jobs-of:' .. incarnation),
    }
  end
end
local names = {}
if batch.limit then
  local start = batch.after == '' and '-' or '(' .. batch.after
  names = redis.call('ZRANGEBYLEX', NS .. ':jobs', start, '+', 'LIMIT', 0, batch.limit)
end
return reply({ live = live_instances(), gone = gone, names = names })
