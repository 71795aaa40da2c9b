-- All that an instance holds now (S28, `machine.judge_registration`).
--
-- A long registration comes in several batches, each with all definitions of its jobs. `own_live`
-- is what the first found: whether the instance was live before. The last says which jobs there
-- were in all (`all_jobs`); what the instance held besides goes.

local incarnation = batch.instance.incarnation
local before = instances()[incarnation]
local own_live = batch.own_live
if own_live == nil then
  own_live = before ~= nil and is_live(before)
end
if before and not own_live then
  before.seen_at = NOW - before.lease_ms - 1
end

local held_before = {} -- by key: what live instances held before this registration
for i = 1, #batch.items do
  local key = KEYS[1 + i]
  if not held_before[key] then
    held_before[key] = holds(key)
  end
end

local function judge(wanted, key)
  local job = load_job(key, wanted.schedule_id)
  local known = wanted.definition_id == job.definition_id
  local in_use = wanted.schedule_id == job.schedule_id
  for _, hold in ipairs(held_before[key]) do
    known = known or hold[1] == wanted.definition_id
    in_use = in_use or hold[2] == wanted.schedule_id
  end
  if not known then
    redis.call('HSET', key, 'definition_id', wanted.definition_id, 'schedule_id',
      wanted.schedule_id, 'definition_at', text(NOW))
  end
  if wanted.schedule_id ~= '' and not (job.settled and job.since and in_use) then
    redis.call('HSET', key, 'since:' .. wanted.schedule_id, text(NOW),
      'settled:' .. wanted.schedule_id, text(NOW))
  end
end

local new_holds, order = {}, {}
for i, wanted in ipairs(batch.items) do
  local key = KEYS[1 + i]
  judge(wanted, key)
  redis.call('HSET', key .. ':definitions', wanted.definition_id, wanted.kept,
    wanted.definition_id .. ':held_at', text(NOW))
  if not new_holds[key] then
    new_holds[key] = {}
    order[#order + 1] = { key, wanted.job }
  end
  table.insert(new_holds[key], { wanted.definition_id, wanted.schedule_id })
end

local of_instance = NS .. ':jobs-of:' .. incarnation
for _, each in ipairs(order) do
  local key, job = each[1], each[2]
  let_go_of(key, incarnation, NOW)
  redis.call('HSET', key .. ':holds', incarnation, cjson.encode(new_holds[key]))
  redis.call('SADD', of_instance, job)
  redis.call('ZADD', NS .. ':jobs', 0, job)
end
if batch.all_jobs then
  local stays = {}
  for _, job in ipairs(batch.all_jobs) do
    stays[job] = true
  end
  for _, job in ipairs(redis.call('SMEMBERS', of_instance)) do
    if not stays[job] then
      let_go_of(key_of(job), incarnation, NOW)
      redis.call('SREM', of_instance, job)
    end
  end
end
put_instance(batch.instance, batch.all_jobs ~= nil)

return reply({
  own_live = own_live,
  answers = answers_of(batch.items, 1, function(wanted, key)
    local job = load_job(key, wanted.schedule_id)
    return {
      current = job.definition_id == wanted.definition_id,
      since = text(job.since or job.definition_at),
      settled = text(job.settled),
      differ = differ((holds(key))),
    }
  end),
})
