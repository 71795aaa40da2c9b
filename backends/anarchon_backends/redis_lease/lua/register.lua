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

-- By key, what one registration knows of a job: what live instances held before it, what this one
-- holds from now on, and its current definition.
local known = {}

local function job_of(key)
  if not known[key] then
    local live, _, own = holds(key, incarnation)
    known[key] = { held_before = live, own_before = own, own = {} }
  end
  return known[key]
end

local function judge(wanted, key)
  local of_job, job = job_of(key), load_job(key, wanted.schedule_id)
  local is_known = wanted.definition_id == job.definition_id
  local in_use = wanted.schedule_id == job.schedule_id
  for _, hold in ipairs(of_job.held_before) do
    is_known = is_known or hold[1] == wanted.definition_id
    in_use = in_use or hold[2] == wanted.schedule_id
  end
  if not is_known then
    job.definition_id, job.definition_at = wanted.definition_id, NOW
    redis.call('HSET', key, 'definition_id', wanted.definition_id, 'schedule_id',
      wanted.schedule_id, 'definition_at', text(NOW))
  end
  if wanted.schedule_id ~= '' and not (job.settled and job.since and in_use) then
    job.since, job.settled = NOW, NOW
    redis.call('HSET', key, 'since:' .. wanted.schedule_id, text(NOW),
      'settled:' .. wanted.schedule_id, text(NOW))
  end
  redis.call('HSET', key .. ':definitions', wanted.definition_id, wanted.kept,
    wanted.definition_id .. ':held_at', text(NOW))
  of_job.definition_id, of_job.definition_at = job.definition_id, job.definition_at
  of_job.job = wanted.job
  table.insert(of_job.own, { wanted.definition_id, wanted.schedule_id })
  return { since = job.since, settled = text(job.settled), fence = text(job.fence) }
end

-- Writes what the instance holds of the job now, where it differs from before.
local function hold(key, of_job)
  local own = cjson.encode(of_job.own)
  if own == of_job.own_before then
    return
  end
  let_go_of(key, incarnation, NOW)
  redis.call('HSET', key .. ':holds', incarnation, own)
  redis.call('SADD', NS .. ':jobs-of:' .. incarnation, of_job.job)
  redis.call('ZADD', NS .. ':jobs', 0, of_job.job)
end

local function live_after(of_job)
  local live = {}
  for _, each in ipairs(of_job.held_before) do
    if each.by ~= incarnation then
      live[#live + 1] = each
    end
  end
  for _, each in ipairs(of_job.own) do
    live[#live + 1] = each
  end
  return live
end

local answers = answers_of(batch.items, 1, judge)
for key, of_job in pairs(known) do
  if of_job.job then
    hold(key, of_job)
  end
end
for i, wanted in ipairs(batch.items) do
  local answer, of_job = answers[i], known[KEYS[1 + i]]
  if not answer.broken then
    answer.current = of_job.definition_id == wanted.definition_id
    answer.since = text(answer.since or of_job.definition_at)
    answer.differ = differ(live_after(of_job))
  end
end

if batch.all_jobs then
  local stays = {}
  for _, job in ipairs(batch.all_jobs) do
    stays[job] = true
  end
  for _, job in ipairs(redis.call('SMEMBERS', NS .. ':jobs-of:' .. incarnation)) do
    if not stays[job] then
      let_go_of(key_of(job), incarnation, NOW)
      redis.call('SREM', NS .. ':jobs-of:' .. incarnation, job)
    end
  end
end
put_instance(batch.instance, batch.all_jobs ~= nil)
return reply({ own_live = own_live, answers = answers })
