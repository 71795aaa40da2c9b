-- What an instance holds of jobs now (S28, `machine.judge_registration`), between the steps in
-- `enrol.lua` and `enrolled.lua`. Each batch has all that it holds of those jobs.
--
-- `batch.live` says which instances lived at the first step. One that came to life or was lost since
-- then is taken as it was: as if this registration had been done then, whole.

local incarnation = batch.incarnation

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
    redis.call('HSET', key, 'schema', SCHEMA, 'definition_id', wanted.definition_id,
      'schedule_id', wanted.schedule_id, 'definition_at', text(NOW))
  end
  if wanted.schedule_id ~= '' and not (job.settled and job.since and in_use) then
    job.since, job.settled = NOW, NOW
    redis.call('HSET', key, 'since:' .. wanted.schedule_id, text(NOW),
      'settled:' .. wanted.schedule_id, text(NOW))
  end
  redis.call('HSET', key .. ':definitions', wanted.definition_id, wanted.kept,
    wanted.definition_id .. ':held_at', text(NOW))
  of_job.definition_id, of_job.definition_at = job.definition_id, job.definition_at
  table.insert(of_job.own, { wanted.definition_id, wanted.schedule_id })
  return { since = job.since, settled = text(job.settled), fence = text(job.fence) }
end

-- Writes what the instance holds of the job now.
local function hold(key, of_job)
  local before = of_job.own_before and cjson.encode(hold_of(of_job.own_before).held)
  if before ~= cjson.encode(of_job.own) then
    let_go_of(key, incarnation, NOW)
  end
  redis.call('HSET', key .. ':holds', incarnation, cjson.encode({ at = NOW, held = of_job.own }))
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

local answers = answers_of(batch.items, judge)
for key, of_job in pairs(known) do
  if #of_job.own > 0 then
    hold(key, of_job)
  end
end
for i, wanted in ipairs(batch.items) do
  local answer, of_job = answers[i], known[KEYS[BEFORE + i]]
  if not answer.broken then
    answer.current = of_job.definition_id == wanted.definition_id
    answer.since = text(answer.since or of_job.definition_at)
    answer.differ = differ(live_after(of_job))
  end
end

return reply({ answers = answers })
