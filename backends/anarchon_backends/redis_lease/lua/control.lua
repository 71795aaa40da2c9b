-- What operators ask of a job (S29), as the module `control` says it.
--
-- For a resumption `batch.live` says which instances live: their schedules are in use, too.

local act_of = {}

-- Nothing of the job is claimed any more; what waits is Skipped, but for triggered runs.
function act_of.pause(act, key, job)
  if job.definition_id == '' then
    return { outcome = 'not_found' }
  end
  if job.paused_at then
    return { outcome = 'done' }
  end
  for _, slot in ipairs(open_slots(key)) do
    local run = unless_broken(load_run, key, act.job, tonumber(slot)) -- else it is nobody's to claim
    if run and run.state == 'due' and run.trigger ~= 'manual' then
      end_run(run, 'skipped', 'paused')
      save_run(key, run)
    end
  end
  redis.call('HSET', key, 'paused_at', text(NOW), 'pause_reason', act.reason)
  return { outcome = 'done' }
end

-- What each schedule in use has settled.
local function settled_in_use(key, job)
  local in_use, settled = { [job.schedule_id] = true }, {}
  for _, hold in ipairs((holds(key))) do
    in_use[hold[2]] = true
  end
  in_use[''] = nil
  for schedule_id in pairs(in_use) do
    settled[schedule_id] = load_job(key, schedule_id).settled
  end
  return settled
end

-- Whether the store is as the one who asks to resume saw it.
local function as_seen(act, job, settled)
  local seen = {}
  for _, passed in ipairs(act.passed) do
    seen[passed.schedule_id] = passed.settled
  end
  for schedule_id, mark in pairs(settled) do
    if seen[schedule_id] ~= mark then
      return false
    end
  end
  for schedule_id in pairs(seen) do
    if not settled[schedule_id] then
      return false
    end
  end
  return act.paused_at == job.paused_at and NOW <= act.latest_at
end

-- The row that stands for the slots that fell due during the pause and have none.
local function pass_paused_over(act, key, job, settled)
  local least
  for _, mark in pairs(settled) do
    least = math.min(least or mark, mark)
  end
  local rows, slots, count, newest = taken(key, least or NOW, NOW), {}, 0, nil
  local more = false
  for _, passed in ipairs(act.passed) do
    more = more or passed.more
    local after = math.max(settled[passed.schedule_id], job.floor)
    for _, slot in ipairs(passed.slots) do
      if slot > after and slot <= NOW and not rows[slot] and not slots[slot] then
        slots[slot], count = true, count + 1
        newest = math.max(newest or slot, slot)
      end
    end
  end
  if newest then
    local run = fresh_run(act.job, newest)
    run.trigger = 'schedule'
    run.slots_covered = (more or count > MISSED_LISTED_MAX) and MISSED_LISTED_MAX or count
    end_run(run, 'skipped', 'paused')
    save_run(key, run)
  end
end

-- First what was missed when the pause began is planned, then the slots that fell due since are
-- passed over.
function act_of.resume(act, key, job)
  if job.definition_id == '' then
    return { outcome = 'not_found' }
  end
  if not job.paused_at then
    return { outcome = 'done' }
  end
  local settled = settled_in_use(key, job)
  if not as_seen(act, job, settled) then
    return { outcome = 'stale' }
  end
  local began, caught_up = math.min(job.paused_at, NOW), caught_up_runs(key, act.job)
  for _, plan in ipairs(act.plans) do
    local resumed = { floor = job.floor, settled = settled[plan.schedule_id] }
    local answer = carry_out(plan, key, resumed, caught_up, began)
    settled[plan.schedule_id] = tonumber(answer.settled)
  end
  pass_paused_over(act, key, job, settled)
  for schedule_id, mark in pairs(settled) do
    -- Not back, where a schedule has settled what is to come by a clock that was set back since.
    redis.call('HSET', key, 'settled:' .. schedule_id, text(math.max(NOW, mark)))
  end
  redis.call('HDEL', key, 'paused_at', 'pause_reason')
  return { outcome = 'done' }
end

-- The first slot from now on that is neither a slot of the job nor taken.
local function free_slot(act, key, job)
  local slot = math.max(NOW, job.floor + 1)
  local rows = taken(key, slot, math.max(slot, act.latest_at))
  for _, each in ipairs(act.slots) do
    rows[each] = true
  end
  while rows[slot] do
    slot = slot + 1
  end
  return slot
end

local function triggered_waiting(runs)
  local count = 0
  for _, run in ipairs(runs) do
    if run.state == 'due' and run.trigger == 'manual' then
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

-- What the new run does about other runs of its job (S18).
local function obey_overlap(act, key, made, runs)
  if act.overlap == 'allow' then
    return
  end
  -- Nobody vouches for the clock here: a lease that seems over is left for a claim to find so (S19).
  local unfinished = look_around(key, runs, false).unfinished
  if act.overlap == 'cancel' then
    unfinished = supersede(key, unfinished, false)
  end
  if #unfinished > 0 then
    made.blocking_slot = oldest(unfinished).slot
    if act.overlap == 'skip' then
      end_run(made, 'skipped', 'overlap')
    end
  end
end

-- Makes a run that is due now.
function act_of.trigger(act, key, job)
  local before = requested(act, key)
  if before then
    return { outcome = 'done', run = shown(before) }
  end
  if job.definition_id == '' then
    return { outcome = 'not_found' }
  end
  local slot = free_slot(act, key, job)
  if slot > act.latest_at then
    return { outcome = 'stale' }
  end
  local runs, payloads = open_runs(key, act.job), key .. ':payloads'
  read(payloads, 'HGET', payloads, text(slot)) -- before anything is written
  if triggered_waiting(runs) >= TRIGGERED_WAITING_MAX then
    return { outcome = 'full' }
  end
  local made = fresh_run(act.job, slot)
  made.trigger, made.state = 'manual', 'due'
  made.window_ms, made.request_id = act.window_ms, act.request_id
  obey_overlap(act, key, made, runs)
  save_run(key, made)
  redis.call('HSET', key .. ':requests', act.request_id, text(slot))
  if act.payload ~= '' and not FINAL[made.state] then
    redis.call('HSET', payloads, text(slot), act.payload)
  end
  return { outcome = 'done', run = shown(made) }
end

-- Asks a run to stop. One that waits, or that no attempt holds, ends at once (S21a).
function act_of.cancel(act, key)
  local run = load_run(key, act.job, act.slot)
  if not run then
    return { outcome = 'not_found' }
  end
  if FINAL[run.state] then
    return { outcome = 'final', run = shown(run) }
  end
  if run.state == 'due' then
    end_run(run, 'skipped', 'cancelled')
  else
    local is_first = run.cancel == ''
    ask_to_stop(run, 'requested', false)
    if is_first and not FINAL[run.state] then
      run.cancel_message = act.message
    end
  end
  save_run(key, run)
  return { outcome = 'done', run = shown(run) }
end

return reply({
  answers = answers_of(batch.items, function(act, key)
    return act_of[act.kind](act, key, load_job(key, ''))
  end),
})
