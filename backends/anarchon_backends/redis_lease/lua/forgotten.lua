-- The last step of leaving, and of pruning instances: they go, their jobs' holds having gone before.
-- One that was heard of meanwhile stays. Until here, whoever prunes does all of it again.

for _, each in ipairs(batch.gone) do
  local known = instances()[each.incarnation]
  if batch.leaving or not known or known.seen_at == each.seen_at then
    redis.call('DEL', NS .. ':jobs-of:' .. each.incarnation)
    redis.call('HDEL', NS .. ':instances', each.incarnation)
  end
end
return reply({})
