-- What operators ask of a job (S29), as the modules `control` and `claim_only` say it.
--
-- `batch.live` says which instances live: their schedules are in use, too.

local function no_job()
  return { outcome = 'not_found' }
end

-- No slot of the job is claimed any more. What waits was triggered, and goes on.
function acts.pause(act, key)
  local job = load_job(key)
  if job.definition_id == '' then
    return no_job()
  end
  if not job.paused_at then
    mark(key)
    redis.call('HSET', key, 'paused_at', text(NOW), 'pause_reason', act.reason)
  end
  return { outcome = 'done' }
end

-- Up to where each schedule in use counts as settled: nothing is planned here, so that only what
-- falls due during the pause is passed over.
local function settled_in_use(key, job)
  local in_use, settled = { [job.schedule_id] = true }, {}
  for _, hold in ipairs(live_of(load_holds(key))) do
    in_use[hold[2]] = true
  end
  in_use[''] = nil
  for schedule_id in pairs(in_use) do
    local since = number(key, read(key, 'HGET', key, 'since:' .. schedule_id), nil)
    settled[schedule_id] = since and math.max(since, job.paused_at)
  end
  return settled
end

-- Whether the store is as the one who asks to resume saw it.
local function as_seen(act, job, settled)
  local seen = {}
  for _, passed in ipairs(act.passed) do
    seen[passed.schedule_id] = passed.settled
    if settled[passed.schedule_id] ~= passed.settled then
      return false
    end
  end
  for schedule_id in pairs(settled) do
    if not seen[schedule_id] then
      return false
    end
  end
  return act.paused_at == job.paused_at and NOW <= act.latest_at
end

local function has_row(key, slot)
  return redis.call('EXISTS', key .. ':' .. text(slot)) == 1
end

-- The row that stands for the slots that fell due during the pause and have none.
local function pass_paused_over(act, key, job, settled)
  local counted, count, newest, more = {}, 0, nil, false
  for _, passed in ipairs(act.passed) do
    more = more or passed.more
    local after = math.max(settled[passed.schedule_id], job.floor)
    for _, slot in ipairs(passed.slots) do
      if slot > after and slot <= NOW and not counted[slot] and not has_row(key, slot) then
        counted[slot], count = true, count + 1
        newest = math.max(newest or slot, slot)
      end
    end
  end
  if newest then
    local run = fresh_run(act.job, newest)
    run.slots_covered = (more or count > MISSED_LISTED_MAX) and MISSED_LISTED_MAX or count
    end_run(run, 'skipped', 'paused')
    save_run(key, run)
  end
end

-- The floor rises to the end of the pause: what was passed over is claimed by nobody.
function acts.resume(act, key)
  local job = load_job(key)
  if job.definition_id == '' then
    return no_job()
  end
  if not job.paused_at then
    return { outcome = 'done' }
  end
  local settled = settled_in_use(key, job)
  if not as_seen(act, job, settled) then
    return { outcome = 'stale' }
  end
  pass_paused_over(act, key, job, settled)
  redis.call('HSET', key, 'floor', text(math.max(job.floor, NOW)))
  redis.call('HDEL', key, 'paused_at', 'pause_reason')
  return { outcome = 'done' }
end

-- The first slot from now on that is neither a slot of the job nor taken; nil: none that is listed.
local function free_slot(act, key, job)
  local of_the_job, slot = {}, math.max(NOW, job.floor + 1)
  for _, each in ipairs(act.slots) do
    of_the_job[each] = true
  end
  while slot <= act.latest_at do
    if not of_the_job[slot] and not has_row(key, slot) then
      return slot
    end
    slot = slot + 1
  end
end

local function waiting_count(key)
  local count = 0
  for _, slot in ipairs(news_of(key)) do
    local row = key .. ':' .. slot
    if WAITS[read(row, 'HGET', row, 'state')] then
      count = count + 1
    end
  end
  return count
end

-- The run that the same request made before, or nil.
local function requested(act, key)
  local slot = read(key .. ':requests', 'HGET', key .. ':requests', act.request_id)
  return slot and load_run(key, act.job, number(key .. ':requests', slot))
end

-- Makes a run that is due now.
function acts.trigger(act, key)
  local before, job = requested(act, key), load_job(key)
  if before then
    return { outcome = 'done', run = shown(before) }
  end
  if job.definition_id == '' then
    return no_job()
  end
  local slot, payloads = free_slot(act, key, job), key .. ':payloads'
  if not slot then
    return { outcome = 'stale' }
  end
  read(payloads, 'HGET', payloads, text(slot)) -- before anything is written
  if waiting_count(key) >= TRIGGERED_WAITING_MAX then
    return { outcome = 'full' }
  end
  local run = fresh_run(act.job, slot)
  run.trigger, run.state = 'manual', 'due'
  run.window_ms, run.request_id = act.window_ms, act.request_id
  save_run(key, run)
  redis.call('HSET', key .. ':requests', act.request_id, text(slot))
  if act.payload ~= '' then
    redis.call('HSET', payloads, text(slot), act.payload)
  end
  return { outcome = 'done', run = shown(run) }
end

-- Asks a run to stop. One that waits, for its first attempt or a retry, or whose holder was not heard
-- of for its lease, ends at once.
function acts.cancel(act, key)
  local run = load_run(key, act.job, act.slot)
  if not run then
    return no_job()
  end
  if FINAL[run.state] then
    return { outcome = 'final', run = shown(run) }
  end
  if WAITS[run.state] then
    end_run(run, 'skipped', 'cancelled')
  else
    if run.cancel == '' then
      run.cancel, run.cancelled_at, run.cancel_message = 'requested', NOW, act.message
    end
    if BETWEEN[run.state] then
      end_run(run, 'failed', 'cancelled')
    elseif not batch.live[run.incarnation] then
      give_up(run, 'runner_lost')
    end
  end
  save_run(key, run)
  return { outcome = 'done', run = shown(run) }
end

-- Tries every command that these need, on keys that no job has.
function acts.probe(_, key)
  local probe = key .. ':probe'
  redis.call('HSET', probe, 'a', '1')
  redis.call('HGET', probe, 'a')
  redis.call('HMGET', probe, 'a')
  redis.call('HGETALL', probe)
  redis.call('HDEL', probe, 'a')
  redis.call('EXISTS', probe)
  redis.call('ZADD', probe, 1, 'a')
  redis.call('DEL', probe)
  return { outcome = 'fine' }
end

return reply()
