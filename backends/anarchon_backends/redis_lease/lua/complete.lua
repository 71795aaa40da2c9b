-- Results, by their tokens (S17, S21a, `machine.judge_completion`).

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

local function record(run, key, outcome)
  local cancel = run.cancel ~= '' and run.cancel or outcome.stopped
  local failed = cancel ~= nil or outcome.failure ~= nil
  local state, reason = failed and 'failed' or 'success', cancel and CANCELLED_AS[cancel] or ''
  run.attempt_state, run.attempt_reason, run.attempt_ended_at = state, reason, NOW
  local began = math.max(run.claimed_at, NOW - outcome.elapsed_ms)
  run.started_at = math.min(run.started_at or began, began)
  run.failure = outcome.failure or ''
  run.result = failed and '' or outcome.result
  run.failed = run.failed + (failed and 1 or 0)
  end_run(run, state, reason)
  save_run(key, run)
  local agreed = agrees(outcome, current(run))
  return { outcome = agreed and 'recorded' or 'already_completed', run = shown(run) }
end

-- A result for an attempt that is over: a repeat, a contradiction, or just late.
local function repeat_or_late(run, key, outcome)
  if agrees(outcome, current(run)) then
    return { outcome = 'recorded', run = shown(run) }
  end
  if run.freed ~= '' and not outcome.stopped then
    return record(run, key, outcome)
  end
  return { outcome = 'already_completed', run = shown(run) }
end

return reply({
  answers = answers_of(batch.items, function(completion, key)
    local run = load_run(key, completion.job, completion.slot)
    if not run or run.attempt == 0 then
      return { outcome = 'unknown_token', run = shown(run) }
    end
    if run.token ~= completion.token then
      local past = past_with(completion.token, run, key)
      local repeated = past and agrees(completion, past)
      return { outcome = repeated and 'recorded' or 'fenced', run = shown(run) }
    end
    if FINAL[run.state] or run.freed ~= '' then
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
  end),
})
