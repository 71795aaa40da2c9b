-- What is asked of single runs: claims, renewals, looks, results, releases.

-- Attempts (S2, S10, S11, S22, S29, `claim_only.judge_claim`) -----------------------------------

local function claimed_by(token, claim, waiting)
  local run = waiting or fresh_run(claim.job, claim.slot)
  run.state, run.token, run.attempt_state = 'claimed', token, 'claimed'
  return run
end

-- What came with the call that triggered the run.
local function payload_of(key, run)
  if run.trigger ~= 'manual' then
    return nil
  end
  return read(key .. ':payloads', 'HGET', key .. ':payloads', text(run.slot)) or nil
end

-- Of a claim whose run has been pruned from history only the token is known.
local function lose_to(token, claim)
  local run = claimed_by(token, claim)
  changes_of(run)
  return { outcome = 'lost', run = shown(run) }
end

local function win(claim, key, waiting)
  local payload = waiting and payload_of(key, waiting)
  local run = claimed_by(claim.token, claim, waiting)
  run.instance_id, run.incarnation, run.claimed_at = claim.instance_id, claim.incarnation, NOW
  run.window_ms, run.cancel_grace_ms = claim.window_ms, claim.cancel_grace_ms
  run.retries = claim.retries
  save_run(key, run)
  return { outcome = 'won', run = shown(run), payload = payload or nil }
end

-- A run that was triggered is claimed whatever is paused; its row says that nobody has it yet.
local function claim_waiting(claim, key, run)
  if run.slot > NOW + EARLY_MAX then -- the clock was set back since
    return { outcome = 'early', run = shown(run) }
  end
  if run.window_ms > 0 and run.slot < NOW - run.window_ms then
    end_run(run, 'skipped', 'abandoned')
    save_run(key, run)
    return { outcome = 'lost', run = shown(run) }
  end
  if not claim.may_run then
    return { outcome = 'unchanged', run = shown(run) }
  end
  return win(claim, key, run)
end

-- The present attempt joins the earlier ones, one line of JSON each, and its fields are free.
local function put_by(run)
  local attempt, number = {}, math.max(run.attempt, 1)
  for _, field in ipairs(ATTEMPT_FIELDS) do
    attempt[field] = run.stored[field]
    run[field] = nil
  end
  run.attempt = number + 1
  run.earlier = run.earlier .. cjson.encode(attempt) .. '\n'
  run.retry_at, run.retry_delay_ms = nil, 0
end

-- Whoever reported the failure of the attempt before makes the next. A time that is further ahead
-- than its pause was written before the clock was set back.
local function claim_retry(claim, key, run)
  local left = run.retry_at - NOW
  if left > 0 and left <= run.retry_delay_ms + EARLY_MAX then
    return { outcome = 'early', run = shown(run) }
  end
  if run.window_ms > 0 and run.retry_at < NOW - run.window_ms then
    end_run(run, 'failed', 'abandoned')
    save_run(key, run)
    return { outcome = 'lost', run = shown(run) }
  end
  if not claim.may_run then
    return { outcome = 'unchanged', run = shown(run) }
  end
  put_by(run)
  return win(claim, key, run)
end

-- A newer slot has been claimed: this one can never be. `run` is its row, where it was said before.
local function pass_over(claim, key, run)
  if not run then
    run = fresh_run(claim.job, claim.slot)
    run.state, run.reason, run.ended_at = 'skipped', 'missed', NOW
    save_run(key, run)
  end
  return { outcome = 'old', run = shown(run) }
end

function acts.claim(claim, key)
  local run = load_run(key, claim.job, claim.slot)
  if run and BETWEEN[run.state] and claim.seen_token == run.token
      and claim.seen_attempt == math.max(run.attempt, 1) then
    return claim_retry(claim, key, run)
  end
  if run and run.token ~= '' then
    local ours = run.token == claim.token and HELD[run.state]
    return {
      outcome = ours and 'won' or 'lost', run = shown(run), payload = ours and payload_of(key, run) or nil,
    }
  end
  if run and WAITS[run.state] then
    return claim_waiting(claim, key, run)
  end
  if run and run.reason ~= 'missed' then
    return { outcome = 'lost', run = shown(run) }
  end
  if claim.seen_token then -- the run that is retried has been pruned meanwhile
    return { outcome = 'late' }
  end
  local job = read(key, 'HMGET', key, 'floor', 'paused_at')
  local floor = number(key, job[1], -1)
  if claim.slot > NOW + EARLY_MAX then
    return { outcome = 'early' }
  end
  if job[2] then
    return { outcome = 'paused' }
  end
  if claim.slot <= floor or claim.slot < NOW - claim.start_deadline_ms then
    return { outcome = 'late' }
  end
  if not claim.may_run then
    return { outcome = 'unchanged' }
  end
  local holder = not run and take(key, claim)
  if holder == claim.token then
    return win(claim, key)
  end
  if holder then
    return lose_to(holder, claim)
  end
  return pass_over(claim, key, run)
end

-- Tokens (S15, S17, S21a, S23 to S26) -----------------------------------------------------------

-- Whether the attempt may still be renewed by its token: from its first cancel on for the grace.
local function is_good(run)
  if not HELD[run.state] then
    return false
  end
  return run.cancel == '' or math.abs(NOW - run.cancelled_at) <= run.cancel_grace_ms
end

-- `claim_only.judge_renewal`.
function acts.renew(renewal, key)
  local run = load_run(key, renewal.job, renewal.slot)
  if not run then
    return { outcome = 'unknown_token' }
  end
  local ours = run.token == renewal.token and is_good(run)
  if not ours or (run.incarnation ~= renewal.incarnation and not renewal.adopt) then
    return { outcome = 'fenced', run = shown(run) }
  end
  if renewal.adopt then
    run.instance_id, run.incarnation = renewal.instance_id, renewal.incarnation
  end
  if renewal.started_at and not run.started_at then
    run.attempt_state, run.started_at = 'running', math.max(renewal.started_at, run.slot)
  end
  run.state = run.attempt_state
  if renewal.cancel and run.cancel == '' then
    run.cancel, run.cancelled_at = renewal.cancel, NOW
  end
  save_run(key, run)
  return { outcome = 'renewed', run = shown(run) }
end

function acts.look(looked, key)
  return { run = shown(load_run(key, looked.job, looked.slot)) }
end

-- When the schedule began, and the job's runs that are news.
function acts.sweep(swept, key)
  local runs = {}
  for _, slot in ipairs(news_of(key)) do
    runs[#runs + 1] = shown(unless_broken(load_run, key, swept.job, tonumber(slot)))
  end
  return { since = read(key, 'HGET', key, 'since:' .. swept.schedule_id) or nil, runs = runs }
end

-- Whether the attempt ended as the outcome says.
local function agrees(outcome, run)
  if outcome.stopped == 'shutdown' then
    return run.attempt_reason == 'handed_over'
  end
  if outcome.stopped then
    return run.attempt_state == 'failed' and run.attempt_reason ~= ''
  end
  if outcome.failure then
    return run.attempt_state == 'failed' and run.failure == outcome.failure
  end
  return run.attempt_state == 'success' and run.result == outcome.result
end

-- Whether an earlier attempt with this token ended as the outcome says.
local function agrees_with_earlier(outcome, run)
  for line in string.gmatch(run.earlier, '[^\n]+') do
    local fine, attempt = pcall(cjson.decode, line)
    if fine and attempt.token == outcome.token then
      return agrees(outcome, setmetatable(attempt, NOTHING))
    end
  end
  return false
end

local function record(run, outcome)
  local cancel = run.cancel ~= '' and run.cancel or outcome.stopped
  local failed = cancel ~= nil or outcome.failure ~= nil
  run.attempt_state, run.attempt_ended_at = failed and 'failed' or 'success', NOW
  run.attempt_reason = cancel and CANCELLED_AS[cancel] or ''
  local began = math.max(run.claimed_at, NOW - outcome.elapsed_ms)
  run.started_at = math.min(run.started_at or began, began)
  run.failure = outcome.failure or ''
  run.result = failed and '' or outcome.result
  local stays = cancel and cancel ~= 'timeout'
  local retried = failed and outcome.retry_in_ms and not stays and run.failed < run.retries
  run.failed = run.failed + (failed and 1 or 0)
  if retried then
    run.state, run.reason, run.cancel, run.cancelled_at = 'retrying', '', '', 0
    run.retry_at, run.retry_delay_ms = NOW + outcome.retry_in_ms, outcome.retry_in_ms
  else
    end_run(run, run.attempt_state, run.attempt_reason)
  end
end

-- `claim_only.judge_completion`.
function acts.complete(completion, key)
  local run = load_run(key, completion.job, completion.slot)
  if not run or run.token == '' then
    return { outcome = 'unknown_token', run = shown(run) }
  end
  if run.token ~= completion.token then
    local repeated = agrees_with_earlier(completion, run)
    return { outcome = repeated and 'recorded' or 'fenced', run = shown(run) }
  end
  if HELD[run.state] then
    if completion.stopped == 'lease_lost' or completion.stopped == 'fenced' then
      return { outcome = 'fenced', run = shown(run) }
    end
    if completion.stopped == 'shutdown' and run.cancel == '' then
      give_up(run, 'handed_over')
    else
      record(run, completion)
    end
    save_run(key, run)
  end
  return { outcome = agrees(completion, run) and 'recorded' or 'already_completed', run = shown(run) }
end

-- `claim_only.judge_release`.
function acts.release(release, key)
  local run = load_run(key, release.job, release.slot)
  if not run or run.token == '' then
    return { outcome = 'unknown_token', run = shown(run) }
  end
  if run.token ~= release.token or run.incarnation ~= release.incarnation then
    return { outcome = 'fenced', run = shown(run) }
  end
  if BETWEEN[run.state] then -- nobody else would go on with it
    end_run(run, 'failed', 'runner_lost')
    run.retry_at = nil
    save_run(key, run)
    return { outcome = 'released', run = shown(run) }
  end
  if not FINAL[run.state] then
    give_up(run, release.reason)
    save_run(key, run)
    return { outcome = 'released', run = shown(run) }
  end
  local repeated = run.attempt_state == 'interrupted' and run.attempt_reason == release.reason
  return { outcome = repeated and 'released' or 'fenced', run = shown(run) }
end

-- Tries every command that runs and claims need, on keys that no run has.
function acts.probe(_, key)
  local version = rawget(redis, 'REDIS_VERSION')
  if OLDEST > 0 and (rawget(redis, 'REDIS_VERSION_NUM') or 0) < OLDEST then
    return { outcome = 'too_old', version = version }
  end
  local probe = key .. ':probe'
  redis.call('HSET', probe, 'a', '1')
  redis.call('HGET', probe, 'a')
  redis.call('HMGET', probe, 'a')
  redis.call('HDEL', probe, 'a')
  redis.call('DEL', probe)
  redis.call('ZADD', probe, 1, 'a')
  redis.call('DEL', probe)
  for _, token in ipairs({ 'a', 'b' }) do
    take(probe, { slot = NOW, token = token, start_deadline_ms = 0 })
  end
  tend(probe)
  redis.call('DEL', probe .. ':claim:' .. text(NOW), probe .. ':slots', probe .. ':ids')
  local exact = text(1791633610123456) == '1791633610123456'
  return { outcome = exact and 'fine' or 'inexact' }
end

return reply()
