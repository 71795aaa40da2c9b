-- First attempts and takeovers, in the order of S2 (`machine.judge_claim`).

local function as_expected(claim)
  return math.abs(claim.expected_at - NOW) <= margin(claim.lease_ms)
end

-- Whether the present attempt is over, so that another may follow: two witnesses, or freed (S19).
local function over(run, witnessed)
  if run.freed ~= '' then
    return true
  end
  return witnessed and lease_left(run) <= 0
end

-- The next attempt of the run, whose earlier ones are closed. `settled`: where it moves to, if so.
local function start_attempt(claim, key, job, run, settled)
  if run.attempt > 0 then
    local past = { attempt = text(run.attempt) }
    for name, field in pairs(CURRENT) do
      local value = stored_as(field, run[field])
      if value ~= '' then
        past[name] = value
      end
    end
    run.past = { attempt = run.attempt, record = cjson.encode(past) }
  end
  job.fence = math.max(job.fence + 1, NOW_US)
  if settled then
    redis.call('HSET', key, 'fence', text(job.fence), 'settled:' .. claim.schedule_id, text(settled))
  else
    redis.call('HSET', key, 'fence', text(job.fence))
  end
  run.attempt, run.token, run.fence = run.attempt + 1, claim.token, job.fence
  run.instance_id, run.incarnation = claim.instance_id, claim.incarnation
  run.cause = claim.seen_attempt > 0 and 'takeover' or 'claim'
  run.attempt_state, run.attempt_reason = 'claimed', ''
  run.claimed_at, run.started_at, run.attempt_ended_at = NOW, nil, nil
  run.failure, run.result = '', ''
  run.state, run.reason, run.freed = 'claimed', '', ''
  run.lease_until = nil
  renew_lease(run, claim.lease_ms)
  run.max_attempts, run.window_ms = claim.max_attempts, claim.window_ms
  run.cancel_grace_ms = claim.cancel_grace_ms
  save_run(key, run)
  return { outcome = 'won', run = shown(run) }
end

local function take_over(claim, key, job, run)
  if not over(run, claim.vouched and as_expected(claim)) then
    if claim.vouched and not as_expected(claim) and over(run, true) then
      return { outcome = 'clock_step' }
    end
    return { outcome = 'lost', run = shown(run) }
  end
  if ended_instead(run) then
    save_run(key, run)
    return { outcome = 'lost', run = shown(run) }
  end
  if not claim.may_run then
    return { outcome = 'unchanged', run = shown(run) }
  end
  interrupt(run)
  return start_attempt(claim, key, job, run)
end

local function claim_of_a_row(claim, key, job, run)
  if run.token == claim.token and is_good(run) then
    renew_lease(run, claim.lease_ms)
    save_run(key, run)
    return { outcome = 'won', run = shown(run) }
  end
  local saw_the_present = claim.seen_attempt == run.attempt and claim.seen_token == run.token
  if FINAL[run.state] or claim.seen_attempt == 0 or not saw_the_present then
    return { outcome = 'lost', run = shown(run) }
  end
  return take_over(claim, key, job, run)
end

-- The oldest unfinished run in the way (nil: none); ends those that are over for good (S18).
local function in_the_way(claim, key)
  if claim.overlap == 'allow' then
    return nil
  end
  local others = {}
  for _, slot in ipairs(unfinished(key)) do
    local other = load_run(key, claim.job, tonumber(slot))
    if other and not FINAL[other.state] then
      others[#others + 1] = other
    end
  end
  local witnessed = claim.vouched and as_expected(claim)
  local blocking
  for _, other in ipairs(others) do
    if over(other, witnessed) and ended_instead(other) then
      save_run(key, other)
    elseif not blocking then
      blocking = other
    end
  end
  return blocking
end

-- S20: `settled` moves to the claimed slot unless a slot between is still unsettled (nil).
local function moved_settled(claim, job)
  if not claim.previous_slot or claim.previous_slot <= job.settled then
    return claim.slot
  end
end

local function first_claim(claim, key, job)
  local blocking = in_the_way(claim, key)
  if blocking then
    if claim.slot > NOW then
      return { outcome = 'early' }
    end
    local skipped = fresh_run(claim.job, claim.slot)
    skipped.trigger = 'schedule'
    skipped.blocking_slot = blocking.slot
    end_run(skipped, 'skipped', 'overlap')
    save_run(key, skipped)
    local settled = moved_settled(claim, job)
    if settled then
      redis.call('HSET', key, 'settled:' .. claim.schedule_id, text(settled))
    end
    return { outcome = 'skipped', run = shown(skipped) }
  end
  if not claim.may_run then
    return { outcome = 'unchanged' }
  end
  local run = fresh_run(claim.job, claim.slot)
  run.trigger = 'schedule'
  return start_attempt(claim, key, job, run, moved_settled(claim, job))
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
