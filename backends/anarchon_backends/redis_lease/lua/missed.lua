-- Slots that nobody claimed in time (S20, `machine.judge_plan`).

-- Which of the slots from `first` to `last` have a row.
local function taken(key, first, last)
  local rows = {}
  local found = read(key .. ':runs', 'ZRANGEBYSCORE', key .. ':runs', text(first), text(last))
  for _, slot in ipairs(found) do
    rows[tonumber(slot)] = true
  end
  return rows
end

-- The job's runs that wait since an earlier plan.
local function caught_up_runs(key, job_name)
  local found = {}
  for _, run in ipairs(open_runs(key, job_name)) do
    if run.state == 'due' and run.trigger == 'catch_up' then
      found[#found + 1] = run
    end
  end
  return found
end

local function record_missed(plan, key, slot, covered)
  local run = fresh_run(plan.job, slot)
  run.trigger, run.slots_covered = 'schedule', covered
  end_run(run, 'skipped', 'missed')
  save_run(key, run)
end

-- Records the newest `limit` of the first `count` slots, and one row for the rest with their number.
local function pass_over(plan, key, slots, count)
  local first_shown = math.max(1, count - plan.limit + 1)
  local rest = first_shown - 1
  local covered_slot
  if rest > 0 or (plan.more and count > 0) then
    covered_slot = rest > 0 and slots[rest] or slots[first_shown]
    record_missed(plan, key, covered_slot, plan.more and MISSED_LISTED_MAX or rest)
  end
  for i = first_shown, count do
    if slots[i] ~= covered_slot then
      record_missed(plan, key, slots[i], 0)
    end
  end
end

-- How many caught-up runs of the job may wait.
local function most_waiting(plan)
  return plan.catch_up == 'latest' and 1 or plan.limit
end

-- From which of the missed slots on they are run after all: the newest, and none that is too old.
local function first_to_be_run(plan, lost)
  local first = #lost + 1
  if plan.catch_up == 'none' then
    return first
  end
  local least = math.max(1, #lost - most_waiting(plan) + 1)
  while first > least and lost[first - 1] >= NOW - plan.window_ms do
    first = first - 1
  end
  return first
end

-- Makes runs of the slots from the `first` on, and gives up the oldest of more caught-up runs than
-- may wait. `caught_up` is brought up to date. How many are given up, and how many new ones wait.
local function catch_up(plan, key, lost, first, caught_up)
  for i = first, #lost do
    local run = fresh_run(plan.job, lost[i])
    run.trigger, run.state, run.window_ms = 'catch_up', 'due', plan.window_ms
    caught_up[#caught_up + 1] = run
  end
  table.sort(caught_up, function(a, b) return a.slot < b.slot end)
  local given_up, due = math.max(0, #caught_up - most_waiting(plan)), 0
  for i, run in ipairs(caught_up) do
    if i <= given_up then
      end_run(run, 'skipped', 'missed')
    elseif run.new then
      due = due + 1
    end
  end
  for i, run in ipairs(caught_up) do
    if i <= given_up or run.new then
      save_run(key, run)
    end
  end
  for _ = 1, given_up do
    table.remove(caught_up, 1)
  end
  return given_up, due
end

-- What becomes of the plan's slots. `by` is when their time must have been over, `caught_up` what
-- waits since an earlier plan: it is brought up to date. Returns the answer; nothing is written of
-- the job but runs and what its schedule has settled.
local function carry_out(plan, key, job, caught_up, by)
  if not job.settled or plan.settled ~= job.settled or job.paused_at then
    return { outcome = 'stale', settled = text(job.settled) }
  end
  local late = {}
  for i, slot in ipairs(plan.slots) do
    if slot >= by - plan.deadlines[i] then
      break
    end
    late[i] = slot
  end
  if #late == 0 then
    return { outcome = 'done', settled = text(job.settled) }
  end
  local rows, lost = taken(key, late[1], plan.slots[#plan.slots]), {}
  local mark = late[#late] -- moves on over those that follow and were claimed meanwhile
  for i = #late + 1, #plan.slots do
    if not rows[plan.slots[i]] then
      break
    end
    mark = plan.slots[i]
  end
  for _, slot in ipairs(late) do
    if not rows[slot] and slot > job.floor then
      lost[#lost + 1] = slot
    end
  end
  local first = first_to_be_run(plan, lost)
  pass_over(plan, key, lost, first - 1)
  local given_up, due = catch_up(plan, key, lost, first, caught_up)
  redis.call('HSET', key, 'settled:' .. plan.schedule_id, text(mark))
  return {
    outcome = 'done', settled = text(mark), missed = first - 1 + given_up, due = due,
  }
end
