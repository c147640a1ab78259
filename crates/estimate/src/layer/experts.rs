//! A mixture of experts, as transformers runs it.

use serde::{Deserialize, Serialize};

use super::{Built, Function, forward::activate};
use crate::{Dtype, Eager, Result, Shape, Tensor, ensure};

/// The sizes of a mixture of experts. Each expert is a gated MLP; a router chooses some of them for each token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// The size of a token.
    pub size: u64,
    /// The inner size of an expert.
    pub hidden: u64,
    /// The number of experts.
    pub experts: u64,
    /// The number of experts that each token passes through.
    pub per_token: u64,
    /// The activation of the gate of an expert.
    pub function: Function,
    /// The inner size of an expert that all tokens pass through; 0 if there is none. In [`RunExperts::Grouped`], its output
    /// is multiplied by its own gate.
    #[serde(default)]
    pub shared: u64,
    /// How the experts run.
    #[serde(default)]
    pub run: RunExperts,
}

/// How experts run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunExperts {
    /// The rows of all tokens, sorted by expert, in one product (`grouped_mm`, the default of transformers).
    #[default]
    Grouped,
    /// Each expert gets all tokens, multiplied by a score that is 0 for most of them (Llama 4).
    All,
}

impl Experts {
    /// Returns the name of the router.
    pub(super) fn router(&self) -> &'static str {
        if self.run == RunExperts::All { "router" } else { "gate" }
    }

    pub(super) fn forward(&self, built: &Built, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        let fits = input.shape.rank() >= 2 && input.shape.last() == self.size;
        ensure(fits, || eager.mismatch(format!("(…, …, {})", self.size), input))?;
        let tokens = input.shape.elements().and_then(|elements| elements.checked_div(self.size)).unwrap_or(0);
        let rows = eager.reshape(input, &Shape::from([tokens, self.size]))?;
        let output = match self.run {
            RunExperts::Grouped => {
                let shared =
                    (self.shared > 0).then(|| built.child("shared_expert").forward(eager, &rows)).transpose()?;
                let mut output = self.grouped(built, eager, &rows)?;
                if let Some(shared) = shared {
                    let gate = eager.sigmoid(&built.child("shared_expert_gate").forward(eager, &rows)?)?;
                    let shared = eager.multiply(&gate, &shared)?;
                    output = eager.add(&output, &shared)?;
                }
                output
            }
            RunExperts::All => self.all(built, eager, &rows)?,
        };
        eager.reshape(&output, &input.shape)
    }

    /// Returns the scores of the chosen experts and their indexes: (tokens, experts of a token).
    fn route(&self, built: &Built, eager: &Eager, rows: &Tensor) -> Result<(Tensor, Tensor)> {
        let logits = built.child(self.router()).forward(eager, rows)?;
        let probabilities = eager.softmax(&eager.to(&logits, Dtype::F32)?)?;
        let [scores, choice] = eager.top_k(&probabilities, self.per_token)?;
        // The scores are divided by their sum.
        let scores = eager.to(&eager.multiply_by_number(&scores)?, logits.dtype)?;
        Ok((scores, choice))
    }

    fn grouped(&self, built: &Built, eager: &Eager, rows: &Tensor) -> Result<Tensor> {
        let (scores, choice) = &self.route(built, eager, rows)?;
        let too_large = || eager.too_large();
        let chosen = rows.shape[0].checked_mul(self.per_token).ok_or_else(too_large)?;
        let flat = |tensor: &Tensor| eager.reshape(tensor, &Shape::from([chosen]));
        let (scores, choice) = (flat(scores)?, flat(choice)?);
        let (_sorted, order) = (eager.integers(&choice.shape)?, eager.integers(&choice.shape)?);
        let selected = eager.rows(rows, &eager.integers(&order.shape)?)?;
        let scores = eager.rows(&scores, &order)?;
        let (gate_up, down) = (built.parameter(eager, 0), built.parameter(eager, 1));
        let both = eager.grouped_product(&selected, &gate_up)?;
        let inner = {
            let [gate, up] = eager.split_last(&both, [self.hidden; 2])?;
            eager.multiply(&activate(eager, self.function, false, &gate)?, &up)?
        };
        drop(both);
        let output = eager.grouped_product(&inner, &down)?;
        drop(inner);
        let sorted = eager.multiply(&output, &eager.reshape(&scores, &Shape::from([chosen, 1]))?)?;
        let back = eager.integers(&order.shape)?;
        drop(eager.integers(&order.shape)?);
        let weighted = eager.rows(&sorted, &back)?;
        drop(sorted);
        let by_token = eager.reshape(&weighted, &Shape::from([rows.shape[0], self.per_token, self.size]))?;
        let sum = eager.sum_over(&by_token, 1)?;
        // The rows sorted by expert, and the outputs of the experts, live until here.
        drop((selected, output, by_token, weighted));
        eager.to(&sum, rows.dtype)
    }

    fn all(&self, built: &Built, eager: &Eager, rows: &Tensor) -> Result<Tensor> {
        let logits = built.child(self.router()).forward(eager, rows)?;
        let (tokens, experts) = (rows.shape[0], self.experts);
        let total = tokens.checked_mul(experts).ok_or_else(|| eager.too_large())?;
        let [largest, choice] = eager.top_k(&logits, self.per_token)?;
        // The scores of all other experts are 0.
        let scattered = eager.multiply_by_number(&logits)?;
        let scores = eager.to(&eager.sigmoid(&eager.to(&scattered, Dtype::F32)?)?, logits.dtype)?;
        drop((scattered, largest, choice));
        let repeated = eager.repeat(rows, 0, experts)?;
        let column = eager.reshape(&eager.transpose(&scores, 0, 1), &Shape::from([total, 1]))?;
        let routed = eager.multiply(&repeated, &column)?;
        drop((repeated, column));
        let (gate_up, down) = (built.parameter(eager, 0), built.parameter(eager, 1));
        let routed_out = {
            let routed = eager.reshape(&routed, &Shape::from([experts, tokens, self.size]))?;
            let both = eager.matmul(&routed, &gate_up)?;
            let [gate, up] = eager.split_last(&both, [self.hidden; 2])?;
            let inner = eager.multiply(&up, &activate(eager, self.function, false, &gate)?)?;
            eager.matmul(&inner, &down)?
        };
        let output = built.child("shared_expert").forward(eager, rows)?;
        let sum = eager.sum_over(&routed_out, 0)?;
        drop((routed, routed_out));
        eager.add_in_place(&output, &sum)
    }
}
