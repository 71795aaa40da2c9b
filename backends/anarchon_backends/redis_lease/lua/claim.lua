-- First attempts, takeovers and retries, in the order of S2 (`machine.judge_claim`).

local CURRENT = { -- the fields of the newest attempt, by the names that past ones are kept under
  token = 'token', fence = 'fence', instance_id = 'instance_id', incarnation = 'incarnation',
  cause = 'cause', state = 'attempt_state', reason = 'attempt_reason', claimed_at = 'claimed_at',
  started_at = 'started_at', ended_at = 'attempt_ended_at', failure = 'failure', result = 'result',
}

local function as_expected(claim)
  return math.abs(claim.expected_at - NOW) <= margin(claim.lease_ms)
end

-- Whether the store's clock is vouched for: the second witness of S19.
local function witnessed(claim)
  return claim.vouched and as_expected(claim)
end

-- The run was won, with what came with the call that triggered it, if one did.
local function won(run)
  return { outcome = 'won', run = shown(run), payload = run.payload }
end

-- What came with the call that triggered the run, or nil.
local function payload_of(key, run)
  if run.trigger ~= 'manual' then
    return nil
  end
  return read(key .. ':payloads', 'HGET', key .. ':payloads', text(run.slot)) or nil
end

-- S20: moves `settled` to the claimed slot, unless a slot between is still unsettled.
local function settle_to(claim, key, job)
  if not claim.previous_slot or claim.previous_slot <= job.settled then
    redis.call('HSET', key, 'settled:' .. claim.schedule_id, text(claim.slot))
  end
end

local function cause_after(run)
  if run.state == 'due' then
    return 'claim'
  end
  return is_retried(run) and 'retry' or 'takeover'
end

-- The closed attempt of a run, as it is kept when another follows.
local function past_of(run)
  local past = { attempt = text(run.attempt) }
  for name, field in pairs(CURRENT) do
    local value = stored_as(field, run[field])
    if value ~= '' then
      past[name] = value
    end
  end
  return { attempt = run.attempt, record = cjson.encode(past) }
end

-- The next attempt of a run, of which none is in progress.
local function start_attempt(claim, key, job, run)
  local cause = cause_after(run)
  interrupt(run)
  if run.attempt > 0 then
    run.past = past_of(run)
  end
  job.fence = math.max(job.fence + 1, NOW_US)
  run.attempt, run.token, run.fence = run.attempt + 1, claim.token, job.fence
  run.instance_id, run.incarnation = claim.instance_id, claim.incarnation
  run.cause, run.attempt_state, run.attempt_reason = cause, 'claimed', ''
  run.claimed_at, run.started_at, run.attempt_ended_at = NOW, nil, nil
  run.failure, run.result = '', ''
  run.state, run.reason, run.freed = 'claimed', '', ''
  run.lease_until = nil
  renew_lease(run, claim.lease_ms)
  run.max_attempts, run.window_ms = claim.max_attempts, claim.window_ms
  run.cancel, run.cancelled_at, run.cancel_message = '', 0, ''
  run.cancel_grace_ms = claim.cancel_grace_ms
  run.retries, run.retry_at, run.retry_delay_ms = claim.retries, nil, 0
  save_run(key, run)
  redis.call('HSET', key, 'fence', text(job.fence))
  return won(run)
end

-- What goes before a run that has a row, the oldest of it; nil: nothing does. A run that waits goes
-- after every unfinished one and after those that wait longer (S18, S20). One that was begun goes
-- after what is in progress; of several that were, after the older.
local function ahead_of(claim, key, run)
  if claim.overlap == 'allow' then
    return nil
  end
  local runs, is_due = open_runs(key, claim.job, run.slot), run.state == 'due'
  local around, before = look_around(key, runs, witnessed(claim)), {}
  for _, other in ipairs(around.unfinished) do
    if is_due or other.slot < run.slot or not over(other, witnessed(claim)) then
      before[#before + 1] = other
    end
  end
  for _, other in ipairs(is_due and around.waiting or {}) do
    if other.slot < run.slot then
      before[#before + 1] = other
    end
  end
  return oldest(before)
end

-- The next attempt of a run that has a row and no attempt in progress, if nothing forbids it.
local function go_on(claim, key, job, run)
  local reason, ahead = why_no_other(run), ahead_of(claim, key, run)
  if reason and not (ahead and reason == 'abandoned') then
    finish(run, reason)
    save_run(key, run)
    return { outcome = 'lost', run = shown(run) }
  end
  if ahead then
    return { outcome = 'queued', run = shown(run) }
  end
  if not claim.may_run then
    return { outcome = 'unchanged', run = shown(run) }
  end
  return start_attempt(claim, key, job, run)
end

-- S19.
local function take_over(claim, key, job, run)
  if over(run, witnessed(claim)) then
    return go_on(claim, key, job, run)
  end
  if claim.vouched and not as_expected(claim) and over(run, true) then
    return { outcome = 'clock_step' }
  end
  return { outcome = 'lost', run = shown(run) }
end

local function claim_of_a_row(claim, key, job, run)
  run.payload = payload_of(key, run)
  if run.token == claim.token and is_good(run) then
    renew_lease(run, claim.lease_ms)
    save_run(key, run)
    return won(run)
  end
  local saw_the_present = claim.seen_attempt == run.attempt and claim.seen_token == run.token
  if FINAL[run.state] or not saw_the_present then
    return { outcome = 'lost', run = shown(run) }
  end
  local too_soon = run.state == 'due' and run.slot > NOW + EARLY_MAX
  if too_soon or retried_later(run, witnessed(claim)) then
    return { outcome = 'early', run = shown(run) }
  end
  if run.state == 'due' or run.state == 'retrying' then
    return go_on(claim, key, job, run)
  end
  return take_over(claim, key, job, run)
end

local function scheduled_run(claim)
  local run = fresh_run(claim.job, claim.slot)
  run.trigger = 'schedule'
  return run
end

local function skipped(claim, blocking)
  local run = scheduled_run(claim)
  run.blocking_slot = blocking.slot
  end_run(run, 'skipped', 'overlap')
  return run
end

-- The slot waits, and replaces what waits by the schedule, or is Skipped where a newer one does.
local function queued(claim, key, unfinished, waiting)
  local before, replaced, newer = {}, {}, {}
  for _, run in ipairs(unfinished) do
    before[#before + 1] = run
  end
  for _, run in ipairs(waiting) do
    local list = run.slot > claim.slot and newer or replaced
    if run.trigger == 'schedule' then
      list[#list + 1] = run
    elseif run.slot < claim.slot then
      before[#before + 1] = run
    end
  end
  if #newer > 0 then
    return skipped(claim, oldest(before) or oldest(newer))
  end
  for _, run in ipairs(replaced) do -- which go on to name the run that they waited for
    end_run(run, 'skipped', 'overlap')
    save_run(key, run)
  end
  local due = scheduled_run(claim)
  due.state, due.window_ms = 'due', claim.window_ms
  due.blocking_slot = before[1] and oldest(before).slot or 0
  return due
end

local function has_older(claim, waiting)
  local first = oldest(waiting)
  return first ~= nil and first.slot < claim.slot
end

-- S18. What a due slot does, by what else there is of its job.
local function first_claim(claim, key, job)
  local around = { unfinished = {}, waiting = {} }
  if claim.overlap ~= 'allow' then
    around = look_around(key, open_runs(key, claim.job, claim.slot), witnessed(claim))
  end
  local unfinished = around.unfinished
  local queues = claim.overlap == 'queue' or claim.overlap == 'cancel'
  local older = queues and has_older(claim, around.waiting)
  if (#unfinished > 0 or older) and claim.slot > NOW then
    return { outcome = 'early' }
  end
  local superseding = claim.overlap == 'cancel' and #unfinished > 0
  if superseding then
    unfinished = supersede(key, unfinished, witnessed(claim))
  end
  if #unfinished > 0 or older or (superseding and not claim.may_run) then
    local own = queues and queued(claim, key, unfinished, around.waiting)
      or skipped(claim, oldest(unfinished))
    save_run(key, own)
    settle_to(claim, key, job)
    return { outcome = FINAL[own.state] and 'skipped' or 'queued', run = shown(own) }
  end
  if not claim.may_run then
    return { outcome = 'unchanged' }
  end
  local run = scheduled_run(claim)
  run.state = 'due'
  local answer = start_attempt(claim, key, job, run)
  settle_to(claim, key, job)
  return answer
end

local function judge(claim, key, job)
  local run = load_run(key, claim.job, claim.slot)
  if run then
    return claim_of_a_row(claim, key, job, run)
  end
  if not job.settled then
    return { outcome = 'unregistered' }
  end
  if claim.slot > NOW + EARLY_MAX then
    return { outcome = 'early' }
  end
  if job.paused_at then
    return { outcome = 'paused' }
  end
  if claim.slot <= math.max(job.floor, job.settled) or claim.slot < NOW - claim.start_deadline_ms
    or claim.seen_attempt > 0 then -- the run it saw has been pruned meanwhile
    return { outcome = 'late' }
  end
  return first_claim(claim, key, job)
end

return reply({
  answers = answers_of(batch.items, function(claim, key)
    local job = load_job(key, claim.schedule_id)
    local answer = judge(claim, key, job)
    answer.fence = text(job.fence)
    return answer
  end),
})
