-- Results, by their tokens (S17, S21a, S22, `machine.judge_completion`).

-- Whether an attempt in this state ended as the outcome says.
local function agrees(outcome, attempt)
  if outcome.stopped == 'shutdown' then
    return attempt.reason == 'handed_over'
  end
  if outcome.stopped then
    return attempt.state == 'failed' and attempt.reason ~= ''
  end
  if outcome.failure then
    return attempt.state == 'failed' and attempt.failure == outcome.failure
  end
  return attempt.state == 'success' and attempt.result == outcome.result
end

local function current(run)
  return {
    state = run.attempt_state, reason = run.attempt_reason,
    failure = run.failure, result = run.result,
  }
end

-- The earlier attempt that had the token, or nil.
local function past_with(token, run, key)
  for number_ = run.attempt - 1, 1, -1 do
    local kept = redis.call('HGET', key .. ':' .. text(run.slot), 'past:' .. text(number_))
    local fine, attempt = pcall(cjson.decode, kept or '')
    if fine and type(attempt) == 'table' and attempt.token == token then
      return {
        state = attempt.state or '', reason = attempt.reason or '',
        failure = attempt.failure or '', result = attempt.result or '',
      }
    end
  end
  return nil
end

-- Whether a failed attempt is followed by another (S22).
local function may_retry(completion, run, cancel)
  return completion.retry_in_ms and (not cancel or cancel == 'timeout')
    and not completion.permanent and run.failed < run.retries and run.attempt < ATTEMPTS_MAX
end

local function retry_in(run, delay_ms)
  run.state, run.reason, run.ended_at = 'retrying', '', nil
  run.cancel, run.cancelled_at = '', 0
  run.retry_at, run.retry_delay_ms = NOW + delay_ms, delay_ms
end

local function record(run, key, completion)
  local cancel = run.cancel ~= '' and run.cancel or completion.stopped
  local failed = cancel ~= nil or completion.failure ~= nil
  local state, reason = failed and 'failed' or 'success', cancel and CANCELLED_AS[cancel] or ''
  run.attempt_state, run.attempt_reason, run.attempt_ended_at = state, reason, NOW
  local began = math.max(run.claimed_at, NOW - completion.elapsed_ms)
  run.started_at = math.min(run.started_at or began, began)
  run.failure = completion.failure or ''
  run.result = failed and '' or completion.result
  local retried = failed and may_retry(completion, run, cancel)
  run.failed = run.failed + (failed and 1 or 0)
  end_run(run, state, reason)
  if retried then
    retry_in(run, completion.retry_in_ms)
  end
  save_run(key, run)
  local agreed = agrees(completion, current(run))
  return { outcome = agreed and 'recorded' or 'already_completed', run = shown(run) }
end

-- A result for an attempt that is over: a repeat, a contradiction, or just late.
local function repeat_or_late(run, key, completion)
  if agrees(completion, current(run)) then
    return { outcome = 'recorded', run = shown(run) }
  end
  if run.freed ~= '' and not completion.stopped then
    return record(run, key, completion)
  end
  return { outcome = 'already_completed', run = shown(run) }
end

local function judge(completion, key, run)
  if run.token ~= completion.token then
    local past = past_with(completion.token, run, key)
    local repeated = past and agrees(completion, past)
    return { outcome = repeated and 'recorded' or 'fenced', run = shown(run) }
  end
  if FINAL[run.state] or run.freed ~= '' or run.state == 'retrying' then
    return repeat_or_late(run, key, completion)
  end
  if completion.stopped == 'lease_lost' or completion.stopped == 'fenced' then
    return { outcome = 'fenced', run = shown(run) }
  end
  if completion.stopped == 'shutdown' and run.cancel == '' then
    free(run, 'handed_over')
    save_run(key, run)
    return { outcome = 'recorded', run = shown(run) }
  end
  return record(run, key, completion)
end

return reply({
  answers = answers_of(batch.items, function(completion, key)
    local run = load_run(key, completion.job, completion.slot)
    if not run or run.attempt == 0 then
      return { outcome = 'unknown_token', run = shown(run) }
    end
    local had_ended = FINAL[run.state]
    local answer = judge(completion, key, run)
    if FINAL[run.state] and not had_ended then
      answer.due = shown(oldest_due(key, completion.job))
    end
    return answer
  end),
})
