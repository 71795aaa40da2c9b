-- The life of a run, as the module `machine` says it.
--
-- Where `machine` returns a changed run, these functions change the run in place; nothing is stored
-- before `save_run`. What they decide on is read before they write.

-- Leases ------------------------------------------------------------------------------------

local function margin(lease_ms)
  return math.floor(lease_ms / MARGIN_SHARE)
end

-- What is left of the lease; at most 0: it is over; nil: there is none. One whose end lies
-- further ahead than its length and the margin allow was written before the clock stepped back.
local function lease_left(run)
  if not run.lease_until or FINAL[run.state] then
    return nil
  end
  local left = run.lease_until - NOW
  if left > run.lease_length_ms + margin(run.lease_length_ms) then
    return 0
  end
  return left
end

local function takeable(run)
  local left = lease_left(run)
  return run.freed ~= '' or (left ~= nil and left <= 0)
end

-- A lease from now on. It never shrinks, unless its end makes no sense any more (F8).
local function renew_lease(run, length_ms)
  if run.lease_until then
    local ahead = run.lease_until - NOW
    if ahead <= run.lease_length_ms + margin(run.lease_length_ms) and ahead > length_ms then
      run.lease_end_at = NOW + ahead
      return
    end
  end
  run.lease_until, run.lease_length_ms = NOW + length_ms, length_ms
  run.lease_end_at = NOW + length_ms
end

-- Whether the present attempt's lease may still be renewed by its token (S17, S21a).
local function is_good(run)
  if (run.state ~= 'claimed' and run.state ~= 'running') or run.freed ~= '' then
    return false
  end
  return run.cancel == '' or math.abs(NOW - run.cancelled_at) <= run.cancel_grace_ms
end

-- Whether no attempt of a run that was begun is in progress, so that another may follow: it was
-- freed, or is to be retried, or two witnesses agree that its lease is over (S19).
local function over(run, witnessed)
  if run.freed ~= '' or run.state == 'retrying' then
    return true
  end
  return witnessed and lease_left(run) <= 0
end

-- Whether a run is to be retried, and not yet. A time further ahead than its delay and a second was
-- written before a step back, if the clock that says so is vouched for (S1).
local function retried_later(run, witnessed)
  if run.state ~= 'retrying' then
    return false
  end
  local left = run.retry_at - NOW
  return left > 0 and not (witnessed and left > run.retry_delay_ms + EARLY_MAX)
end

-- How attempts and runs end -----------------------------------------------------------------

-- Whether what follows the run's present attempt is a retry: it failed, or timed out (S22).
local function is_retried(run)
  if run.cancel == '' then
    return run.state == 'retrying'
  end
  return run.cancel == 'timeout' and run.failed < run.retries
end

local function counts_as_lost(run)
  return run.freed == '' or run.freed == 'runner_lost'
end

-- From when on the run could have had its next attempt.
local function unwanted_since(run)
  if run.state == 'due' then
    return run.slot
  end
  if run.state == 'retrying' then
    return run.retry_at
  end
  return run.freed ~= '' and run.attempt_ended_at or run.lease_end_at
end

-- Why a run without an attempt in progress may have no other (S19, S21a, S22); nil: it may.
local function why_no_other(run)
  local retried = is_retried(run)
  if run.cancel ~= '' and not retried then
    return CANCELLED_AS[run.cancel]
  end
  if run.attempt >= ATTEMPTS_MAX then
    return 'attempts_exhausted'
  end
  if run.state ~= 'due' and not retried then
    if run.lost + (counts_as_lost(run) and 1 or 0) >= run.max_attempts then
      return 'attempts_exhausted'
    end
  end
  local since = unwanted_since(run)
  if since and run.window_ms ~= 0 and since < NOW - run.window_ms then
    return 'abandoned'
  end
  return nil
end

-- Closes the present attempt, and counts it where it counts.
local function interrupt(run)
  if run.state == 'due' or run.state == 'retrying' then
    return
  end
  local timed_out = is_retried(run)
  if timed_out then
    run.failed = run.failed + 1
  elseif counts_as_lost(run) then
    run.lost = run.lost + 1
  end
  if run.freed == '' then -- else it was closed when it was freed
    run.attempt_ended_at = math.min(NOW, run.lease_end_at)
    run.attempt_state = timed_out and 'failed' or 'interrupted'
    run.attempt_reason = timed_out and 'timeout' or 'runner_lost'
  end
end

local function end_run(run, state, reason)
  run.state, run.reason, run.freed, run.ended_at = state, reason, '', NOW
  run.lease_until, run.lease_length_ms, run.lease_end_at = nil, nil, nil
end

-- Ends a run without an attempt in progress from outside: Skipped if it was never begun.
local function finish(run, reason)
  if run.state == 'due' then
    return end_run(run, 'skipped', reason)
  end
  local in_progress = run.state ~= 'retrying'
  interrupt(run)
  if run.cancel ~= '' and in_progress then
    run.attempt_state, run.attempt_reason = 'failed', reason
  end
  end_run(run, 'failed', reason)
end

-- Ends a run without an attempt in progress if it may have no other.
local function end_if_no_other(run)
  local reason = why_no_other(run)
  if reason then
    finish(run, reason)
  end
end

-- The present attempt is over now, and the run open for the next, or ended with it.
local function free(run, reason)
  local timed_out = run.cancel == 'timeout'
  run.attempt_state = timed_out and 'failed' or 'interrupted'
  run.attempt_reason = timed_out and 'timeout' or reason
  run.attempt_ended_at = NOW
  run.state, run.reason, run.freed = 'interrupted', reason, reason
  end_if_no_other(run)
end

-- A request to stop, in a run that was begun; it ends where no attempt holds it (S21a). The first
-- request stays, but for a timeout after which there would be a retry.
local function ask_to_stop(run, reason, witnessed)
  if run.cancel == '' then
    run.cancel, run.cancelled_at = reason, NOW
  elseif is_retried(run) then
    run.cancel = reason
  end
  if over(run, witnessed) then
    end_if_no_other(run)
  end
end

-- Overlap (S18) -----------------------------------------------------------------------------

-- Tells a job's runs that are not final apart, and ends those that are over for good. Nothing is
-- abandoned (S19) while another run is in progress.
local function look_around(key, runs, witnessed)
  local ended, unfinished, waiting, given_up, all_over = {}, {}, {}, {}, true
  for _, run in ipairs(runs) do
    local is_over = run.state ~= 'due' and over(run, witnessed)
    local reason = is_over and why_no_other(run)
    if run.state == 'due' then
      waiting[#waiting + 1] = run
    elseif reason and reason ~= 'abandoned' then
      ended[#ended + 1] = { run, reason }
    else
      unfinished[#unfinished + 1] = run
      given_up[#given_up + 1] = reason and { run, reason } or nil
      all_over = all_over and is_over
    end
  end
  for _, each in ipairs(ended) do
    finish(each[1], each[2])
    save_run(key, each[1])
  end
  local stay = {}
  if all_over then
    for _, each in ipairs(given_up) do
      finish(each[1], each[2])
      save_run(key, each[1])
    end
  end
  for _, run in ipairs(unfinished) do
    if not FINAL[run.state] then
      stay[#stay + 1] = run
    end
  end
  return { unfinished = stay, waiting = waiting }
end

-- Asks unfinished runs to stop, as a newer one is due; those that go on nevertheless.
local function supersede(key, unfinished, witnessed)
  local stay = {}
  for _, run in ipairs(unfinished) do
    ask_to_stop(run, 'superseded', witnessed)
    save_run(key, run)
    if not FINAL[run.state] then
      stay[#stay + 1] = run
    end
  end
  return stay
end

-- The oldest of some runs, or nil.
local function oldest(runs)
  local first
  for _, run in ipairs(runs) do
    if not first or run.slot < first.slot then
      first = run
    end
  end
  return first
end
